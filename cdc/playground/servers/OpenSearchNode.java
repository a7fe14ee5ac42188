import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.concurrent.CountDownLatch;
import java.util.function.Supplier;
import org.opensearch.common.settings.Settings;
import org.opensearch.env.Environment;
import org.opensearch.node.InternalSettingsPreparer;
import org.opensearch.node.Node;

/**
 * One OpenSearch node with plugins from the class path.
 *
 * Arguments: plugin classes joined by commas, then settings as name=value. Runs until a signal ends
 * it. Written without lambdas and with raw types, because Janino compiles it.
 */
public class OpenSearchNode extends Node {
    public OpenSearchNode(Environment environment, Collection plugins) {
        super(environment, plugins, false);
    }

    public static void main(String[] arguments) throws Exception {
        List plugins = new ArrayList();
        String[] names = arguments[0].split(",");
        for (int i = 0; i < names.length; i++) {
            plugins.add(Class.forName(names[i]));
        }
        Settings.Builder settings = Settings.builder();
        for (int i = 1; i < arguments.length; i++) {
            int equals = arguments[i].indexOf('=');
            settings.put(arguments[i].substring(0, equals), arguments[i].substring(equals + 1));
        }
        Supplier nodeName = new Supplier() {
            public Object get() {
                return "local";
            }
        };
        final OpenSearchNode node = new OpenSearchNode(
            InternalSettingsPreparer.prepareEnvironment(
                settings.build(), new HashMap(), null, nodeName),
            plugins);
        final CountDownLatch ended = new CountDownLatch(1);
        Runtime.getRuntime().addShutdownHook(new Thread() {
            public void run() {
                try {
                    node.close();
                } catch (Exception error) {
                    error.printStackTrace();
                }
                ended.countDown();
            }
        });
        node.start();
        ended.await();
    }
}
